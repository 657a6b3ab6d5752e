"""`fsmount bench`: measure on your own data and machine."""
