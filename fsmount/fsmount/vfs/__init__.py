"""A version as a file system, without any driver's protocol."""
