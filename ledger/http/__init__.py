"""The gate over HTTP: the OpenAI API for agents, one address per rollout, and the control plane beside it."""
