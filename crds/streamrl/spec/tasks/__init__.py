"""What a task is made of: where its prompts come from, what answers earn."""
