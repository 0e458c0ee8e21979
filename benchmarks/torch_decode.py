"""Greedy decoding by transformers' GPT-2, for `decode.py`.

Reads requests from standard input, one JSON object per line: `prompts` and `num_tokens`. Writes one object per line:
`seconds` and the new `tokens` of each prompt. The first argument is the folder of a model.
"""

# torch is not a dependency of this workspace.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

import json
import sys
import time

import torch
import transformers

if __name__ == "__main__":
    torch.set_grad_enabled(False)
    model = transformers.GPT2LMHeadModel.from_pretrained(sys.argv[1]).eval()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(versions | {"num_threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompts, num_tokens = torch.tensor(request["prompts"]), request["num_tokens"]
        began = time.perf_counter()
        texts = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "tokens": texts[:, prompts.shape[1] :].tolist()}), flush=True)
