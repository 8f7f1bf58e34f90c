//! The pcapng file: an interface for each process, packets of raw IP, and how many bytes were lost.

use std::borrow::Cow;
use std::io::Write;
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::blocks::interface_statistics::{
    InterfaceStatisticsBlock, InterfaceStatisticsOption,
};
use pcap_file::pcapng::blocks::section_header::{SectionHeaderBlock, SectionHeaderOption};
use pcap_file::{DataLink, Endianness};

use super::attached::Event;
use super::streams::{Packet, Streams};

/// What a process could not show for want of room.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Lost {
    /// Bytes of streams.
    pub bytes: u64,
    /// Events.
    pub events: u64,
}

struct Interface {
    /// Told so far.
    lost: Lost,
    /// To be told with the next packet.
    untold: Lost,
    packets: u64,
}

/// The file being written.
pub struct Capture<W: Write> {
    file: PcapNgWriter<W>,
    streams: Streams,
    interfaces: Vec<Interface>,
    packets: u64,
}

impl<W: Write> Capture<W> {
    /// Begins the file.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn begin(out: W) -> Result<Capture<W>> {
        let options = vec![SectionHeaderOption::UserApplication(Cow::Borrowed(concat!(
            "usmc dump ",
            env!("CARGO_PKG_VERSION")
        )))];
        let section =
            SectionHeaderBlock { endianness: Endianness::Big, options, ..Default::default() };
        let file = PcapNgWriter::with_section_header(out, section)?;
        Ok(Capture { file, streams: Streams::default(), interfaces: Vec::new(), packets: 0 })
    }

    /// A process more; returns its number.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn add(&mut self, pid: u32, comm: &str) -> Result<u32> {
        let options = vec![
            InterfaceDescriptionOption::IfName(format!("usmc-{pid}").into()),
            InterfaceDescriptionOption::IfDescription(format!("process {pid} ({comm})").into()),
            // 10^-9 s.
            InterfaceDescriptionOption::IfTsResol(9),
        ];
        let linktype = DataLink::RAW;
        let block = InterfaceDescriptionBlock { linktype, snaplen: 0, options };
        self.file.write_pcapng_block(block)?;
        self.interfaces.push(Interface {
            lost: Lost::default(),
            untold: Lost::default(),
            packets: 0,
        });
        Ok(self.interfaces.len() as u32 - 1)
    }

    /// What interface `number` has lost so far.
    pub fn lost(&mut self, number: u32, lost: Lost) {
        let interface = &mut self.interfaces[number as usize];
        interface.untold.bytes += lost.bytes - interface.lost.bytes;
        interface.untold.events += lost.events - interface.lost.events;
        interface.lost = lost;
    }

    /// Writes what became of an event, at most until there are `most` packets. `carrier` as for [`Streams::take`].
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(
        &mut self,
        number: u32,
        event: &Event,
        carrier: &Rc<str>,
        most: u64,
    ) -> Result<()> {
        let mut packets = Vec::new();
        self.streams.take(event, carrier, |packet| packets.push(packet));
        for packet in packets {
            if self.packets < most {
                self.packet(number, packet)?;
            }
        }
        Ok(())
    }

    fn packet(&mut self, number: u32, packet: Packet) -> Result<()> {
        let interface = &mut self.interfaces[number as usize];
        let untold = std::mem::take(&mut interface.untold);
        let mut options = Vec::new();
        let mut comments: Vec<String> = packet.comment.into_iter().collect();
        if untold.events > 0 {
            options.push(EnhancedPacketOption::DropCount(untold.events));
            comments.push(format!("{} bytes were dropped: usmc dump was too slow", untold.bytes));
        }
        if !comments.is_empty() {
            options.push(EnhancedPacketOption::Comment(comments.join("; ").into()));
        }
        let block = EnhancedPacketBlock {
            interface_id: number,
            timestamp: Duration::from_nanos(packet.time_ns),
            original_len: packet.bytes.len() as u32,
            data: packet.bytes.into(),
            options,
        };
        self.file.write_pcapng_block(block)?;
        interface.packets += 1;
        self.packets += 1;
        Ok(())
    }

    /// Packets written.
    pub fn packets(&self) -> u64 {
        self.packets
    }

    /// Makes what was written visible.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn flush(&mut self) -> Result<()> {
        Ok(self.file.get_mut().flush()?)
    }

    /// Ends the file with what each interface has had and lost; returns the sum of the latter.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn end(mut self) -> Result<Lost> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let mut sum = Lost::default();
        for (number, interface) in self.interfaces.iter().enumerate() {
            let Lost { bytes, events } = interface.lost;
            sum = Lost { bytes: sum.bytes + bytes, events: sum.events + events };
            let mut options = vec![
                InterfaceStatisticsOption::IsbIfRecv(interface.packets + events),
                InterfaceStatisticsOption::IsbIfDrop(events),
            ];
            if events > 0 {
                let comment = format!("{bytes} bytes were dropped");
                options.push(InterfaceStatisticsOption::Comment(comment.into()));
            }
            self.file.write_pcapng_block(InterfaceStatisticsBlock {
                interface_id: number as u32,
                timestamp: now as u64,
                options,
            })?;
        }
        self.flush()?;
        Ok(sum)
    }
}
