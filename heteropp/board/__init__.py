"""The board: what runs left in their folders, as one page. It only reads files."""
