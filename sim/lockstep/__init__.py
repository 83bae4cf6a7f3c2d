"""All ranks in one process, one running at a time: the ``torch.distributed`` backend ``lockstep``."""
