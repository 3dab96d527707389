"""Facts about the classes of Transformers and PEFT: batches, wrapped modules, copies, the census."""
