"""The vocabulary, cut by rows: lookup, loss, log-probabilities, and slices that are whole logits to a user's loss.

statistics  seven numbers per token, [7, tokens], with a join over parts of the rows and a gradient of the logits
lookup      the lookup in a table of which a rank has some rows
head        a head whose logits exist in tiles
loss        the operator of the built-in loss: label smoothing, entropy and accuracy included
slices      exchanges between the ranks of a vocabulary, under autograd
log_probs   TRL's fused head on hidden states and some rows of the head
logits      the tensor of a rank's slice that has the shape of whole logits
pipeline    a slice of embedding and head for every pipeline rank

Every number is a sum or a maximum over rows, so each division of the rows is a fold of `statistics.join`: tiles, ranks,
slices of a pipeline. Shapes, with tokens = sequence * batch:

    logits       [tokens, rows]            of a part of the rows, in the type of the product
    statistics   [3 to 7, tokens]          of a part, in fp32: 3 for a loss, 5 with entropy and accuracy
    exchanged    [ranks, 3 to 7, tokens]   once per loss; backward exchanges nothing, since all ranks have these
    joined       [3 to 7, tokens]          of the vocabulary, equal on all ranks

Composes with:

    tensor parallelism   a rank has some rows and all tokens; the join is over its ranks
    pipeline             the first and the last stage have all rows; with `spread_vocabulary` every rank has a slice,
                         and hands the statistics so far on with the hidden states
    context parallelism  a rank has its part of the tokens; targets are shifted before the sequence is cut
    data parallelism     replicas have other tokens; the factor of the loss counts the tokens of all. With ZeRO-3, a
                         rank has all its rows while an operator runs
    experts              the ranks of a vocabulary have the same tokens, whatever experts they have
    recompute            lowers the limit above which logits exist in tiles
    CUDA graphs          nothing waits for a value on the device: tiles and chunks follow from shapes
    fp8                  the head multiplies in 16 bits or more
"""
