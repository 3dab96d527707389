"""The methods of Transformers, Accelerate and torch that classes of ours override, and the check that they are still
called: a method that was renamed there would be silently without effect. Names that are only called or read raise by
themselves when they are gone.
"""
