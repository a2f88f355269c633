"""What targets whose kernels are written in Gluon share."""
