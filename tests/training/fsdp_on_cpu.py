"""Run `mars` under FSDP on CPUs: accelerate shards on accelerators only, so it is told of one."""

import sys

from accelerate import PartialState
from accelerate.utils import DistributedType

original = PartialState.__init__


def initialise(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


PartialState.__init__ = initialise

if __name__ == "__main__":
    from torch.distributed.tensor import DTensor

    from mars.cli.main import run
    from mars.training import run as training

    save = training.save

    def report_and_save(trainer, *args):
        is_sharded = all(isinstance(p, DTensor) for p in trainer.model.parameters())
        print(f"sharded: {is_sharded}", file=sys.stderr)
        save(trainer, *args)

    training.save = report_and_save
    run()
