"""What predicts noise: the families of diffusion backbones, one small class each."""
