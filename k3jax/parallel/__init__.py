"""More than one device: sequences over a mesh axis."""
