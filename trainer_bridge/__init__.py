"""From the trajectory log to new weights: stream, batches, advantages, losses, the FSDP trainer, publishing."""
