"""What answers the model's turns: environments, made again by replay wherever they are needed."""
