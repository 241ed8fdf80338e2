"""Programs of the user's that ask the model through an OpenAI-compatible endpoint, one for each sample."""
