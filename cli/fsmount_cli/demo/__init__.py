"""`fsmount demo`: the whole story on real data, told with the commands a user types."""
