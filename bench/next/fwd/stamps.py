#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a thread block did when: python3 stamps.py OUT_FOLDER/stamps_NAME.npy [thread block, 0 to 4]

Cycles from each event to the next, of warpgroup 0 and 1 of the consumers, the producer and the guard. The patch "stamps" writes
them.
"""
import numpy as np, sys
f=sys.argv[1]; blk=int(sys.argv[2]) if len(sys.argv)>2 else 1
d=np.load(f)[blk]
names={0:"S waited",1:"max/mask done",2:"turn got",3:"exp done",4:"operands there",5:"S(n) there",7:"V there",8:"next tile known",9:"Q there",10:"K there",11:"PV waited",12:"O left",16:"p:ask",17:"p:tile",18:"p:drawn",19:"p:K issued",20:"p:V issued",21:"p:Q issued",24:"g:V came",25:"g:clean"}
for role in range(4):
    ev=[(int(x)>>27,int(x)&0x7ffffff) for x in d[role] if x]
    if not ev: continue
    t0=ev[0][1]
    print("role",role,"events",len(ev),"span",ev[-1][1]-t0)
    # mean of intervals by (from,to)
    iv={}
    for a,b in zip(ev[8:],ev[9:]):
        iv.setdefault((a[0],b[0]),[]).append((b[1]-a[1])&0x7ffffff)
    tot=sum(sum(v) for v in iv.values())
    for k,v in sorted(iv.items(), key=lambda kv:-sum(kv[1])):
        print(f"   {names[k[0]]:>16} -> {names[k[1]]:<16} n {len(v):4} mean {np.mean(v):8.0f} median {np.median(v):8.0f} share {sum(v)/tot:5.2f}")
