"""Lossless weight patches: what turns one image into another, bit for bit.

:mod:`~rollmesh_protocol.patch.codec` is the codec, made of :mod:`~rollmesh_protocol.patch.blocks` (how an image is
cut), :mod:`~rollmesh_protocol.patch.tables` (probabilities) and :mod:`~rollmesh_protocol.patch.kernels` (the loops).

Why it is coded like this
-------------------------
Measured with ``make bench-patch`` and its captured GRPO steps of SmolLM2-135M (269.0 MB in bf16); bytes of one step:

========================================================  ===============  ===============  ====================
coding                                                    lr 1e-6, step 7  lr 1e-5, step 7  off-grid 1e-5 step 7
========================================================  ===============  ===============  ====================
int32 index + bf16 value                                        2,858,064       14,744,400            13,088,412
dense XOR, zstd-1                                               1,735,039        6,446,351             5,460,771
u16 gap + absolute value, zstd-1                                1,376,762        6,700,304             6,073,798
u16 gap + XOR value, zstd-1                                     1,144,483        4,407,090             3,635,407
u8-escape gap + signed step, zstd-1                             1,065,113        3,583,052             2,894,861
gap streams and step planes per exponent, zstd-3                  518,518        2,361,902             2,377,621
Rice gaps, best of Rice and Exp-Golomb steps                      530,728        1,989,536             1,938,443
constriction's range coder, same symbols, static tables           399,897        1,652,149             1,719,685
**this codec** (rANS, static tables, merged classes)              402,276        1,655,946             1,723,718
the exponent-context bound                                        394,930        1,690,781             1,797,129
========================================================  ===============  ===============  ====================

The bound is beaten because changes come in clusters: gaps are not geometric, and their tables learn it. The line of
constriction counts symbols and raw bits alone, without tables and blocks; it takes 25 ns a symbol to decode and must
be fed all symbols of a model at once, so that the walk over elements would be a second pass in numpy (6 s): numba
does both in one (below 10 ns a symbol).

More contexts were tried on the same steps and left out: the octave of the class's last gap saves 0.1 to 0.8 % of the
gaps before its tables are paid for; the tensor 1.7 to 10 %, and costs five times that in tables; the sign of the last
step in the class 0.1 %; sign and size of the last change in the same column 0.5 to 1 %. Probabilities of 11 bits are
no faster and 0.4 % larger.

Contexts come from the old values, so a payload leads only forwards. What is decoded, a list of flips, leads both ways.
"""
