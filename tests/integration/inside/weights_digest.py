"""Print the digest of weights, and of the same weights with one thing changed."""

import json
import os

import torch

from primus.training import facts, gloo


def digest(*weights: torch.Tensor) -> str:
    model = torch.nn.ParameterList(torch.nn.Parameter(weight, requires_grad=False) for weight in weights)
    return facts.digest([model])


os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.manual_seed(1)
first, second = torch.randn(33, 7), torch.randn(231)
bit = first.clone()
bit.view(torch.int32)[32, 6] ^= 1
exchanged = second.clone()
exchanged[[3, 200]] = exchanged[[200, 3]]
found = {
    "plain": digest(first, second),
    "bit": digest(bit, second),
    "exchanged": digest(first, exchanged),
    "other order": digest(second, first),
    "other shape": digest(first.reshape(7, 33), second),
    "other dtype": digest(first.view(torch.int32), second),
    "not contiguous": digest(first.t(), second),
    "less": digest(first),
}
pieces = [facts._checksums(first, at_once) for at_once in (1, 10, 1000)]
print(json.dumps({"digests": found, "pieces": pieces, "again": digest(first.clone(), second.clone())}))
gloo.leave()
