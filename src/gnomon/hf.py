"""`import gnomon.hf`, and Transformers loads models that Gnomon wrote.

```python
import gnomon.hf
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("D")  # written by: gnomon apply nf12 --model M --out D
```

Without the import Transformers refuses such a folder, because it doesn't know the model type.
"""

from gnomon.plugins.hf import register
from gnomon.plugins.hf_lowrank import save_lowrank

__all__ = ["register", "save_lowrank"]

register()
