"""Parts of launchers that portable kernels belong to, whichever target they run for."""
