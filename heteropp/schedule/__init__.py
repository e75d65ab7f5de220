"""What a stage does and in which order: actions, schedules, and the messages that are due."""
