"""Bytes to model and back; nothing here touches a file system."""
