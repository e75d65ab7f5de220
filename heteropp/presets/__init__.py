"""Clusters and models to start from."""
