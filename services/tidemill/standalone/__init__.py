"""One command for a laptop: supervises the other processes on this machine."""
