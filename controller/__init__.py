"""The loop: pumps, finalizer group, replay buffer, samplers, configuration, command line."""
