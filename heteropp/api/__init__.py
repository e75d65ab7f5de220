"""What `import heteropp` gives, and the commands are thin over."""
