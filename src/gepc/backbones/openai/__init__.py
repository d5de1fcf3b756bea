"""OpenAI's improved-diffusion and guided-diffusion checkpoints, as diffusers networks."""
