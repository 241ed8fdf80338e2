"""An agent host's link to the scheduler, in a process (and on Kubernetes a container) that runs no code of the user's."""
