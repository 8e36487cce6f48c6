"""Many runs at once: sweeps of a configuration, and what their runs say when they are laid side by side."""
