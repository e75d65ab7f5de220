"""The tables of the five papers, from our planners under our simulator; one file a paper."""
