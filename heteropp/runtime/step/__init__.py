"""What a step does around its computing: messages, sums, the update, and what guards it."""
