"""A group from planned to consumed: its states, its samples, the staleness window, what is planned and scored."""
