"""Training sets as versioned, verified, mountable directories."""
