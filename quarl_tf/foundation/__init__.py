"""What every room may use: errors, files, seeds, displays, TensorFlow."""
