"""What hf_helix takes of other packages beyond their documented interfaces, and the check that it is still there.

`overridden` lists the methods of Transformers, Accelerate and torch that classes of ours override, `used` the private
and unstable names that we call, read or set, and `check` compares both with what is installed when a class of
`integrations` that users see is made.
"""
