"""The kernel driver: FUSE spoken on /dev/fuse directly, by servers that may be replaced."""
