"""Showing versions as directories: drivers, and what starts, lists and ends mounts."""
