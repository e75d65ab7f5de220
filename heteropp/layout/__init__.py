"""Who holds which slice of what: annotations (HSPMD), parameters, flat buffers, resharding."""
