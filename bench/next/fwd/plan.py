#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes plan.json: which variants at which shapes (README.md says what each row is to answer)."""
import json
V=lambda so,shape=0,**k: dict(so=so,shape=shape,**k)
def row(name,dim,b,hq,hkv,l,lkv,c,variants,**k): return dict(name=name,dim=dim,batch=b,hq=hq,hkv=hkv,lq=l,lkv=lkv,causal=c,variants=variants,**k)
def price(shape): return {f"p_{v}":V(f"p_{v}",shape,wrong=1) for v in ("NOPARTIAL","NOGUARD","NOEPI","NOSLACK","NOEXP","NOTURN","all")}
def tog(shape,*n): return {f"t{i}":V("base",shape,together=i) for i in n}
S={64:0,128:2,256:3}
rows=[]
def std(dim, extra={}, **k):
    s=S[dim]
    d={"base":V("base",s),"primed":V("base",s,prime=1),"spin":V("spin",s),**{f"pf{i}":V(f"pf{i}",s) for i in (1,3,7,15,16)},"lean":V("lean",s),"skip":V("skip",s),"only":V("only",s)}
    if dim==64: d["tl"]=V("turn",0); d["q4"]=V("q4",0)
    if dim==256: d["k64"]=V("k64",3,wrong=1)
    d.update(extra); return d
rows.append(row("64 causal 512",64,32,32,32,512,512,1,std(64,{**tog(0,16,33,66,132),**price(0),"onehead":V("base",0,one_head=1,wrong=1)}),floor="base"))
rows.append(row("64 x 197",64,64,12,12,197,197,0,std(64,{**tog(0,12,132),**price(0),"onehead":V("base",0,one_head=1,wrong=1)}),floor="base",fa2=1))
rows.append(row("64 x 128 causal",64,64,32,32,128,128,1,std(64,{**tog(0,132,528),**price(0),"onehead":V("base",0,one_head=1,wrong=1)}),floor="base",fa2=1))
rows.append(row("256 causal 512",256,32,8,8,512,512,1,std(256,{**tog(3,8,16,33,48,132),**price(3),"onehead":V("base",3,one_head=1,wrong=1)}),floor="base"))
rows.append(row("128 causal 512",128,32,16,16,512,512,1,std(128,{**tog(2,16,33,66,132),**price(2),"onehead":V("base",2,one_head=1,wrong=1)}),floor="base"))
rows.append(row("64 full 512",64,32,32,32,512,512,0,std(64,{**tog(0,4,33,132),**price(0)}),floor="base"))
rows.append(row("64 causal 1k",64,16,32,32,1024,1024,1,std(64,tog(0,16,33,66))))
rows.append(row("128 full 512",128,32,16,16,512,512,0,std(128,{**tog(2,4,33,132)})))
rows.append(row("256 full 512",256,32,8,8,512,512,0,std(256,{**tog(3,4,33,132)})))
rows.append(row("128 causal 1k",128,16,16,16,1024,1024,1,std(128,tog(2,16,33))))
rows.append(row("256 causal 1k",256,16,8,8,1024,1024,1,std(256,tog(3,8,16,33))))
rows.append(row("64 causal 8x1k 12h",64,8,12,12,1024,1024,1,std(64)))
rows.append(row("tiny",64,1,1,1,128,128,1,{"base":V("base",0)}))
for dim in (64,128,256):
    h=2048//dim
    e={"base":V("base",1 if dim==64 else S[dim]),"skip":V("skip",1 if dim==64 else S[dim])}
    if dim==64: e.update(short=V("base",0),short_skip=V("skip",0),short_tl=V("turn",0))
    rows.append(row(f"{dim} window 1024 16k",dim,1,h,h,16384,16384,1,e,window=1024,repeat=11))
for dim in (64,128,256):
    h=2048//dim
    for l in (2048,16384):
        e={"base":V("base",1 if dim==64 else S[dim]),"skip":V("skip",1 if dim==64 else S[dim])}
        if dim==256: e.update(k64=V("k64",3,wrong=1))
        if dim==64: e.update(short=V("base",0),short_tl=V("turn",0))
        rows.append(row(f"{dim} causal {l}",dim,16384//l,h,h,l,l,1,e,repeat=9 if l<9000 else 7))
for c in (1,0):
    for h in (1,2,3,4,6,8,12,16,24,32):
        for l in (2048,4096,8192,16384,32768):
            if h*l>=1<<18 or h*l<1<<13: continue
            rows.append(row(f"q {'causal' if c else 'full'} {h}h {l}",64,1,h,h,l,l,c,{"192":V("base",1),"128":V("base",0)},repeat=5,peers=0))
for c in (1,0):
    for l in (128,197,300,384,512,640,768,1024,1280,1536,2048,3072,4096):
        rows.append(row(f"b {'causal' if c else 'full'} 32h {l}",64,16384//l,32,32,l,l,c,{"192":V("base",1),"128":V("base",0)},repeat=7,peers=0))
for l,h,hkv,lq in ((4096,32,8,256),(8192,32,8,1024),(2048,40,8,700)):
    rows.append(dict(name=f"g {h}/{hkv} {lq} on {l}",dim=64,batch=2,hq=h,hkv=hkv,lq=lq,lkv=l,causal=1,variants={"192":V("base",1),"128":V("base",0)},repeat=7,peers=0))
stamps=[dict(name=n,dim=d,batch=b,hq=h,hkv=h,lq=l,lkv=l,causal=c,so="stamps",shape=s) for n,d,b,h,l,c,s in
 [("64c512",64,32,32,512,1,0),("64x197",64,64,12,197,0,0),("64x128",64,64,32,128,1,0),("256c512",256,32,8,512,1,3),("128c512",128,32,16,512,1,2),("64f512",64,32,32,512,0,0)]]
json.dump(dict(budget=80,repeat=15,rows=rows,stamps=stamps),open("plan.json","w"))
print(len(rows))
