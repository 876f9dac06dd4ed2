"""Where token rows live: the DataPlane protocol, its TransferQueue adapter, and the token sink."""
