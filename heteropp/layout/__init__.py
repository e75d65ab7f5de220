"""Who holds which slice of what: flat buffers, annotations (HSPMD), boundary resharding."""
