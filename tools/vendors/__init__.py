"""Who takes part in vendor-bench: chips by ditorch, and CLBlast by itself."""
