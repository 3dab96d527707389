"""Reports for people, as text, pages and pictures.

timeline      the timeline model: bars of operators on streams; the streams of a window, the ranks of a schedule
strands       two layers under several plans, on the same time axis
heatmap       overlap efficiencies of pairs, and the time of a micro-batch by kind, as text
page          the same in one HTML file, for a browser
comparison    the gain of a plan over others, here and on other links
live          the figures of the logs
flops         floating-point operations of a model, peaks of devices
perfetto      traces for ui.perfetto.dev
figures       files, colours, heads and legends of all pictures
"""
