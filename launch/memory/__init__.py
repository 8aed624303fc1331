"""Estimates the peak memory of each actor from the model's shape and the settings. Pure: a formula.

A learner keeps parameters and two AdamW moments in float32 whatever model.dtype is: 12 bytes a parameter (with another
actor.optimizer 4 to 10), sharded over the learners of a copy (topology.replicas). A step adds the activations of a
micro-batch and gradients (4 bytes a parameter). With one micro-batch the larger of the two counts, with several their
sum. On a CPU several ranks also keep room for the layers that FSDP2 has gathered (`gathered`). Loading a model takes
its file and a copy. Frozen models (reference, teacher) add their weights in model.dtype, sharded, too. With actor.lora
the model's own weights are frozen as well, and 12 and 4 bytes count for the numbers of the adapters only. A generator
keeps the weights twice (live and receive buffer; with actor.lora live and base), the KV cache of all slots at full
length, and the prefix cache on a GPU and with several turns. The memory of libraries was measured on CPU. With
checkpoint.async_save, or on a GPU, each learner rank copies what it writes of a checkpoint to the host.

Begin with `ranks.py`.
"""
