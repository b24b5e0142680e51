"""The rig that the proof runs on: forked ranks on CPU tensors and gloo."""
