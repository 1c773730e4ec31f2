"""What is done to whole models."""
