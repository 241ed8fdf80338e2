"""The trainer: takes scored groups as they come, takes optimiser steps, publishes weights, keeps checkpoints."""
