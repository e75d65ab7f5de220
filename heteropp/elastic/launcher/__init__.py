"""Who decides which generation trains, and starts and reaps its members."""
