"""What torch.distributed calls in every world: a process group that records each call and hands it on."""
