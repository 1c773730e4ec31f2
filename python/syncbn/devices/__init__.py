"""Several devices of one process."""
