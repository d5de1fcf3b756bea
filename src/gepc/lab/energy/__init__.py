"""Energy models: the network, its training losses, and the method that scores images with it."""
