"""Stream a mounted version into PyTorch."""
