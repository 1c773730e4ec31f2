"""What ranks exchange: messages, the ways that they take, groups, and errors that name ranks."""
